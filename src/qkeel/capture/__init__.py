"""One recorded pass of a model: its attention calls, and what is known about them.

The files from the call to what is known of it:

    intercept            CaptureMode, which reports the attention calls of a pass
    named_attention      replaces F.scaled_dot_product_attention under its name, so that most passes need no mode
    readers, logsumexp   fused functions: their arguments, and the logsumexp that a kernel hands out
    hand_written         attention written by hand: tags follow scores to the softmax and the values; products: q and k
                         behind them; score_calls: the call that results
    described            sites that are described by hand
    known_sites          what is known of the sites of a model while a pass is captured
    calls                what a call is: heads, masks, scale, statistics; visible_pattern: the type of its layer
    example              the arguments of a pass, and the state that it must not change: user_hooks, contents,
                         random_streams
"""
