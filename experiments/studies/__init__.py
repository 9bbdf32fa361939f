"""Studies that answered one question each, written with the public functions of `qkeel.lab`."""

# One remedy of each kind, with the options of its paper.
ONE_OF_EACH = (
    *(
        "none",
        "qk_norm",
        "qkv_norm",
        "softcap:cap=50",
        "qk_clip:threshold=30",
        "lalr:tau=0.1",
        "sigmoid",
    ),
    *("key_norm", "qk_lr:factor=0.1", "swin_norm"),
)
