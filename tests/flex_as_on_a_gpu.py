"""Torch's flex_attention on a CPU, as it is on a GPU."""

from torch.nn.attention import flex_attention as home


def flex_as_on_a_gpu(monkeypatch):
    """Lets flex_attention hand out all that torch computes on a CPU and refuses there: maxima and gradients."""
    inner = home._apply_kernel_options

    def options(
        q,
        k,
        v,
        lse,
        given,
        aux=None,
    ):
        wanted = aux is not None and aux.max_scores
        made = inner(
            q,
            k,
            v,
            lse,
            given,
            aux._replace(max_scores=False) if aux is not None else None,
        )
        made["OUTPUT_MAX"], made["OUTPUT_LOGSUMEXP"] = wanted, True
        return made

    monkeypatch.setattr(home, "_apply_kernel_options", options)
    monkeypatch.setattr(home, "_validate_device", lambda q, k, v: None)
