"""What the first measured pass says about what its queries see, read from the calls that are measured anyway."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from torch import Tensor, nn

from qkeel import distributed as dist
from qkeel.audit.config_differences import call_differences
from qkeel.audit.output_gates import shut_gates
from qkeel.audit.visibility import PackedTokens, SeenKeys, findings, seen_keys
from qkeel.capture.calls import Seen
from qkeel.errors import caution
from qkeel.patching.guards import FaultGuard
from qkeel.sites.find import site_label
from qkeel.sites.site import Sites

_OFF = "looking at what queries see failed and is left out: {}. The model is watched all the same"
# Of a layer, at most: a second on one core.
_WEIGHTS = 1 << 26
_SAID = "in the first measured pass, {}"


@final
class FirstLook:
    """Says once, of the first pass that is measured and may be trained, what `check` says about what queries see.

    The weights of its calls are computed block by block, in this pass alone.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.guard = FaultGuard(_OFF)
        self._tokens: PackedTokens | None = None
        self._layers: dict[str, SeenKeys] = {}
        self.over = False
        # What is wrong here must not be the monitor's end.
        self.guard.off.append(self._stop)

    def _stop(self) -> None:
        self.over = True

    def begin(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Begins a pass with these arguments."""
        self._layers = {}
        if not self.over:
            self._tokens = self.guard(PackedTokens.of, self._model, args, kwargs)

    def call(self, site: str, call: Seen) -> None:
        """Reads the first call of a site."""
        if not self.over and site not in self._layers:
            self.guard(self._read_call, site, call)

    def _read_call(self, site: str, call: Seen) -> None:
        if self._tokens is not None:
            label = site_label(site, type(self._model).__name__)
            self._layers[site] = seen_keys(label, [call], self._tokens, _WEIGHTS)

    def end(self, sites: Sites, gates: Mapping[str, Tensor]) -> None:
        """Ends the pass, and warns of what is seen that should not be.

        gates: the mean gate of each head's output by site."""
        if not self.over and self._layers:
            self.over = True
            self.guard(self._say, sites, gates)
            self._layers, self._tokens = {}, None

    def _say(self, sites: Sites, gates: Mapping[str, Tensor]) -> None:
        assert self._tokens is not None
        sentences = findings(self._model, self._tokens, self._layers.values())
        sentences += call_differences(self._model, self._layers, sites)
        sentences += shut_gates({self._layers[x].layer: gates[x] for x in gates})
        for sentence in sentences:
            if dist.rank() == 0:
                caution(_SAID.format(sentence))
