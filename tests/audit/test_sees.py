"""`check(sees=...)`: planted leaks of many kinds are found and named, and their clean twins are not blamed."""

import random

import pytest
import torch
import torch.nn.functional as F
from tests.attention import Joint, from_heads, scores
from tests.quick import one_in
from torch import nn

import qkeel
from qkeel import Documents, Window
from qkeel.errors import InvalidTypeError, InvalidValueError, ShapeError
from qkeel.metrics import Status

HEADS, WIDTH, VOCABULARY = 2, 16, 23


def causal(t):
    return torch.ones(1, t, t, dtype=torch.bool).tril()


def one_ahead(t):
    return torch.ones(1, t, t, dtype=torch.bool).tril(1)


def inverted(t):
    return ~causal(t) | torch.eye(t, dtype=torch.bool)


def everything(t):
    return torch.ones(1, t, t, dtype=torch.bool)


def second_head_sees_everything(t):
    return torch.cat([causal(t), everything(t)])


def chunks_of_four(t):
    chunk = torch.arange(t) // 4
    return causal(t) | (chunk[:, None] == chunk)[None]


class SelfAttention(Joint):
    def __init__(self, mask, *, fused):
        super().__init__(None, WIDTH, HEADS)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mask, self.fused = mask, fused

    def forward(self, x):
        q, k, v = self.heads(x)
        mask = self.mask(x.shape[1])
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            y = scores(q, k).masked_fill(~mask, -torch.inf).softmax(-1) @ v
        return self.out(from_heads(y))


class Convolution(nn.Module):
    """A convolution over tokens, padded on the left alone or on both sides."""

    def __init__(self, *, ahead):
        super().__init__()
        self.convolution, self.ahead = nn.Conv1d(WIDTH, WIDTH, 3), ahead

    def forward(self, x):
        return self.convolution(F.pad(x.mT, (2 - self.ahead, self.ahead))).mT


class Mixing(nn.Module):
    """Anything that is done with all tokens at once."""

    def __init__(self, mix):
        super().__init__()
        self.forward = mix


def norm_over(dim):
    return Mixing(lambda x: x / x.square().mean(dim, keepdim=True).add(1e-5).sqrt())


def pooled(*, so_far):
    """The mean of all tokens, or of those so far, joins each."""
    if not so_far:
        return Mixing(lambda x: x.mean(1, keepdim=True).expand_as(x))
    return Mixing(lambda x: x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None])


class BatchNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return self.norm(x.mT).mT


class ExpertChoice(nn.Module):
    """Each expert takes its tokens: of the whole sequence (which leaks), or each token takes its expert."""

    def __init__(self, *, by_expert):
        super().__init__()
        self.router, self.by_expert = nn.Linear(WIDTH, 2), by_expert
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            if self.by_expert:
                rank = scores[..., i].argsort(1, descending=True).argsort(1)
                taken = rank < x.shape[1] // 2
            else:
                taken = scores.argmax(-1) == i
            out = out + taken[..., None] * expert(x)
        return out


def shift(by):
    return Mixing(lambda x: F.pad(x, (0, 0, by, -by)))


class Model(nn.Module):
    """Tokens to logits through blocks, one of which may hold a leak."""

    def __init__(self, blocks):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(blocks)
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in blocks])
        self.dropout, self.head = nn.Dropout(0.2), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.embed(tokens)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + self.dropout(block(norm(x)))
        return self.head(x)


def attention(mask):
    return lambda fused: SelfAttention(mask, fused=fused)


# A block that leaks, its clean twin, and words of the sentence besides the module. Attention may be fused.
KINDS = {
    "no mask": (attention(everything), attention(causal), "head"),
    "one ahead": (attention(one_ahead), attention(causal), "head"),
    "inverted mask": (attention(inverted), attention(causal), "head"),
    "one head": (attention(second_head_sees_everything), attention(causal), "head 1"),
    "chunks": (attention(chunks_of_four), attention(causal), "head"),
}
for name, leaky, clean in (
    ("convolution", lambda: Convolution(ahead=1), lambda: Convolution(ahead=0)),
    ("norm over time", lambda: norm_over(1), lambda: norm_over(-1)),
    ("batch norm", BatchNorm, lambda: nn.LayerNorm(WIDTH)),
    (
        "expert choice",
        lambda: ExpertChoice(by_expert=True),
        lambda: ExpertChoice(by_expert=False),
    ),
    ("shift", lambda: shift(-1), lambda: shift(1)),
    ("pooling", lambda: pooled(so_far=False), lambda: pooled(so_far=True)),
):
    KINDS[name] = (
        lambda _, make=leaky: make(),
        lambda _, make=clean: make(),
        "no attention",
    )


def drawn(make, seed):
    """A model with the block at a drawn place among causal attention, its tokens, and that place."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    blocks = [
        SelfAttention(causal, fused=draw.random() < 0.5)
        for _ in range(draw.randint(1, 3))
    ]
    place = draw.randint(0, len(blocks))
    blocks.insert(place, make(draw.random() < 0.5))
    # Statistics of the batch are used in training alone.
    is_training = isinstance(blocks[place], BatchNorm) or draw.random() < 0.5
    tokens = torch.randint(VOCABULARY, (draw.randint(1, 3), draw.randint(6, 40)))
    return Model(blocks).train(is_training), tokens, place


class PerToken(nn.Module):
    """What a critic returns, or a loss that is not reduced: one number a token."""

    def __init__(self, model, form):
        super().__init__()
        self.model, self.form = model, form

    def forward(self, tokens):
        logits = self.model(tokens)
        if self.form == "values":
            return logits[..., 0]
        losses = F.cross_entropy(logits.mT, tokens, reduction="none")
        return losses.flatten() if self.form == "flat losses" else losses


FORMS = ("logits", "values", "losses", "flat losses")


@pytest.mark.parametrize("seed", one_in([0, 1], 2))
@pytest.mark.parametrize("name", KINDS)
def test_a_planted_leak_is_found_and_named_and_its_clean_twin_is_not_blamed(name, seed):
    leaky, clean, words = KINDS[name]
    draw = 1000 * seed + list(KINDS).index(name)
    form = FORMS[draw % 4]
    model, tokens, place = drawn(leaky, draw)
    if form != "logits":
        model = PerToken(model, form)
    health = qkeel.check(model, tokens, sees="causal")
    assert health.status is Status.NOT_HEALTHY
    assert f"blocks.{place}" in str(health)
    assert words in str(health)
    model, tokens, _ = drawn(clean, draw)
    if form != "logits":
        model = PerToken(model, form)
    state = {key: x.clone() for key, x in model.state_dict().items()}
    assert qkeel.check(model, tokens, sees="causal").healthy
    assert all(torch.equal(state[key], x) for key, x in model.state_dict().items())


class EncoderDecoder(nn.Transformer):
    """A transformer whose decoder hides later tokens, or does not; its encoder never does."""

    def __init__(self, is_causal):
        super().__init__(16, 2, 1, 1, 16, batch_first=True)
        self.is_causal = is_causal

    def forward(self, src, tgt):
        mask = self.generate_square_subsequent_mask(tgt.shape[1])
        return super().forward(src, tgt, tgt_mask=mask if self.is_causal else None)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("length", [6, 9])
def test_of_an_encoder_decoder_the_decoders_tokens_are_tried(is_causal, length):
    model = EncoderDecoder(is_causal).eval()
    batch = torch.randn(2, 6, 16), torch.randn(2, length, 16)
    health = qkeel.check(model, batch, sees="causal")
    assert health.healthy == is_causal
    assert is_causal or "decoder.layers.0.self_attn" in str(health)


class Masked(Joint):
    """Attention over tokens with a mask [b 1 t t] that is made of another argument."""

    def __init__(self, mask):
        super().__init__(None, WIDTH, HEADS)
        self.embed, self.mask = nn.Embedding(VOCABULARY, WIDTH), mask

    def forward(self, tokens, position_ids=None, attention_mask=None):
        other = attention_mask if position_ids is None else position_ids
        q, k, v = self.heads(self.embed(tokens))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(other))
        return from_heads(y)


def packed(*, isolated, later=False):
    """Attention over packed documents that regards their borders, or not."""

    def mask(position_ids):
        ids = (position_ids == 0).cumsum(-1)
        same = ids[:, :, None] == ids[:, None]
        same = same if isolated else torch.ones_like(same)
        return (same if later else same & causal(ids.shape[1]))[:, None]

    return Masked(mask)


POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 4, 0, 1, 2, 3]])


def test_documents_that_see_each_other_are_found():
    batch = {
        "tokens": torch.randint(VOCABULARY, POSITIONS.shape),
        "position_ids": POSITIONS,
    }
    documents = Documents.from_positions(POSITIONS)
    assert documents.ids[0].tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert qkeel.check(packed(isolated=True), batch, sees=documents).healthy
    health = qkeel.check(packed(isolated=False), batch, sees=documents)
    assert health.status is Status.NOT_HEALTHY
    assert "outside document" in str(health)
    both_ways = packed(isolated=True, later=True)
    assert not qkeel.check(both_ways, batch, sees=documents).healthy
    assert qkeel.check(
        both_ways, batch, sees=Documents(documents.ids, causal=False)
    ).healthy


def windowed(size):
    return lambda t: causal(t) & torch.ones(t, t, dtype=torch.bool).triu(1 - size)


def test_a_window_that_never_reached_the_kernel_is_found_and_named():
    tokens = torch.randint(VOCABULARY, (2, 30))
    model = Model(
        [
            SelfAttention(windowed(4), fused=True),
            SelfAttention(windowed(4), fused=False),
        ]
    )
    assert qkeel.check(model, tokens, sees=Window(4)).healthy
    health = qkeel.check(model, tokens, sees=Window(3))
    assert "blocks.0, head" in str(health)
    assert health.status is Status.NOT_HEALTHY
    assert not qkeel.check(
        Model([pooled(so_far=True), *model.blocks]), tokens, sees=Window(4)
    ).healthy
    assert qkeel.check(model, tokens[:, :6], sees=Window(4)).status is Status.NOT_KNOWN


def softly_masked(mask, number):
    """Attention that hides pairs by a number that is added to their logits."""

    def attend(q, k, v):
        added = number * ~mask(q.shape[2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=added.to(q.dtype))

    return Joint(attend, WIDTH, HEADS)


def test_a_mask_of_a_small_number_keeps_a_window_until_its_weights_move_something():
    tokens = torch.randint(VOCABULARY, (2, 12))
    for number, is_kept in ((-80.0, True), (-10.0, False)):
        model = Model([softly_masked(windowed(3), number)])
        assert qkeel.check(model, tokens, sees=Window(3)).healthy is is_kept


def test_of_half_precision_it_is_said_that_small_leaks_do_not_show():
    tokens = torch.randint(VOCABULARY, (2, 6))
    model = Model([SelfAttention(causal, fused=True)]).bfloat16().eval()
    health = qkeel.check(model, tokens, sees="causal")
    assert health.healthy
    assert "float32 too" in str(health)


class Named(nn.Module):
    """Embeddings in, a loss, logits and one vector a sample out."""

    def __init__(self, mask):
        super().__init__()
        self.attention = SelfAttention(mask, fused=True)

    def forward(self, inputs_embeds):
        logits = self.attention(inputs_embeds)
        return {"loss": logits.mean(), "logits": logits, "pooled": logits.mean(1)}


def test_outputs_without_positions_are_said_to_be_not_judged():
    batch = {"inputs_embeds": torch.randn(2, 9, WIDTH)}
    health = qkeel.check(Named(causal), batch, sees="causal")
    assert health.healthy
    assert "not judged" in str(health)
    assert "loss, pooled" in str(health)
    assert "'logits'" in str(qkeel.check(Named(one_ahead), batch, sees="causal"))


def test_a_compiled_model_is_checked_as_it_runs():
    tokens = torch.randint(VOCABULARY, (1, 8))
    model = torch.compile(
        Model([SelfAttention(one_ahead, fused=True)]).eval(), backend="eager"
    )
    assert "blocks.0, head" in str(qkeel.check(model, tokens, sees="causal"))


@pytest.mark.parametrize("weights", ["head", "out"])
def test_a_model_that_passes_nothing_on_is_not_called_healthy(weights):
    """A new model whose head or whose attention's output projection is zero hides any leak."""

    class New(nn.Module):
        def __init__(self, mask):
            super().__init__()
            self.embed = nn.Embedding(VOCABULARY, WIDTH)
            self.attention = SelfAttention(mask, fused=True)
            self.out, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)

        def forward(self, tokens):
            x = self.embed(tokens)
            # An output of a token alone says nothing of the other one.
            return {"embedded": x, "logits": self.head(x + self.out(self.attention(x)))}

    model, tokens = New(everything), torch.randint(VOCABULARY, (2, 9))
    assert qkeel.check(New(causal), tokens, sees="causal").status is Status.HEALTHY
    assert qkeel.check(model, tokens, sees="causal").status is Status.NOT_HEALTHY
    nn.init.zeros_(getattr(model, weights).weight)
    assert qkeel.check(model, tokens, sees="causal").status is Status.NOT_KNOWN


def test_what_cannot_be_checked_is_refused():
    model, tokens = (
        Model([SelfAttention(causal, fused=True)]),
        torch.randint(VOCABULARY, (2, 8)),
    )
    with pytest.raises(InvalidValueError, match="causal"):
        qkeel.check(model, tokens, sees="left to right")
    with pytest.raises(ShapeError):
        qkeel.check(model, tokens, sees=Documents(torch.zeros(2, 5, dtype=torch.int64)))
    with pytest.raises(InvalidValueError):
        Window(0)
    with pytest.raises(InvalidValueError, match="two positions"):
        qkeel.check(model, tokens[:, :1], sees="causal")
    with pytest.raises(InvalidValueError, match="axis of positions"):
        qkeel.check(nn.Conv2d(3, 3, 1), torch.rand(2, 3, 8, 8), sees="causal")
    with pytest.raises(InvalidTypeError, match="model"):
        qkeel.check("run", sees="causal")
    with pytest.raises(InvalidValueError, match="axis"):
        qkeel.check(nn.Sequential(model, nn.Flatten()), tokens, sees="causal")
