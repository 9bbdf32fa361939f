"""What holds of remedies by how weights are kept: "equal" to one process, or "refused" with words of the error."""

from __future__ import annotations

_CLIPS = ("qk_clip", "qk_clip by group", "qk_clip with matched steps")
_STEPS = ("lalr", "qk_lr", "qk_weight_decay", *_CLIPS, "three at once")
_ALL = dict.fromkeys((*_STEPS, "spectral_cap", "softcap", "z_loss"), "equal")
_NEW_PARAMETERS = {
    "qk_norm before": "equal",
    "qk_norm after": "refused",
    "sigma_reparam before": "equal",
}
_PARTS = {"spectral_cap": "refused: needs all rows and columns of a head at once"}

# Each process has all weights.
WHOLE: dict[str, str] = _ALL | _NEW_PARAMETERS
# Each has all weights and a part of the tokens. (The model has no vocabulary, for z_loss, and attention alone.)
TOKENS: dict[str, str] = _ALL | {"qk_norm before": "equal", "qk_norm after": "refused"}
del TOKENS["z_loss"]
# Each has parts, which are gathered for a pass.
GATHERED: dict[str, str] = _ALL | _PARTS | _NEW_PARAMETERS | {"qk_norm after": "equal"}
# Each has the weights of some heads. (Torch itself cannot split layers with a parametrization, as sigma_reparam makes.)
BY_HEADS: dict[str, str] = (
    _ALL
    | _PARTS
    | {
        "qk_norm before": "refused: tensor parallelism has split",
        "qk_norm after": "refused",
    }
)
# Each has some of the layers.
STAGES: dict[str, str] = _ALL | {"qk_norm after": "equal"}
# Each has parts, and computes in float32 with weights of float64.
MIXED: dict[str, str] = {
    name: "equal in float32" if found == "equal" else found
    for name, found in GATHERED.items()
}
