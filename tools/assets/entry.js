// The marks of the report; what is not named here is shaken out of the bundle.
export {axisX, axisY} from "@observablehq/plot";
export {cell} from "@observablehq/plot";
export {dot} from "@observablehq/plot";
export {frame} from "@observablehq/plot";
export {gridX, gridY} from "@observablehq/plot";
export {line} from "@observablehq/plot";
export {plot} from "@observablehq/plot";
export {pointer} from "@observablehq/plot";
export {rect} from "@observablehq/plot";
export {ruleX, ruleY} from "@observablehq/plot";
export {selectLast} from "@observablehq/plot";
export {text} from "@observablehq/plot";
export {tip} from "@observablehq/plot";
