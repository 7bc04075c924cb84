"""Transformers, from their dimensions: language models, encoders, vision; and recommenders."""

from __future__ import annotations

from dataclasses import dataclass

from tilewise.problems.networks.net import Feature, Net, flat


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """The dimensions of a transformer. Zero means absent, or for `kv_heads` as many as heads."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int = 0
    head_dim: int = 0
    inner: int
    """Width of the MLP, of one expert where there are any."""
    is_gated: bool = False
    vocabulary: int = 0
    experts: int = 0
    active: int = 0
    """Experts that each token visits."""
    shared: int = 0
    """Experts that every token visits."""


def blocks(net: Net, model: Transformer, tokens: int, cached: int = 0) -> None:
    """The products of all layers when each sequence brings `tokens` new ones."""
    rows = net.batch * tokens
    head = model.head_dim or model.hidden // model.heads
    kv = model.kv_heads or model.heads
    with net.at("layer", times=model.layers):
        net.gemm("qkv", rows, (model.heads + 2 * kv) * head, model.hidden)
        attention(net, model.heads, tokens, cached + tokens, head, head)
        net.gemm("out", rows, model.hidden, model.heads * head)
        mlp(net, model, rows)


def attention(net: Net, heads: int, queries: int, keys: int, dim: int, value_dim: int) -> None:
    """The two products of unfused attention, for every sequence and head."""
    net.product("scores", net.batch * heads, queries, keys, dim)
    net.product("values", net.batch * heads, queries, value_dim, keys, layout="rrr")


def mlp(net: Net, model: Transformer, rows: int) -> None:
    """A dense MLP, or the experts that `rows` tokens visit when they spread evenly."""
    up = model.inner * (2 if model.is_gated else 1)
    if not model.experts:
        net.gemm("up", rows, up, model.hidden)
        net.gemm("down", rows, model.hidden, model.inner)
        return
    net.gemm("router", rows, model.experts, model.hidden)
    visits = rows * model.active
    busy = min(model.experts, visits)
    net.product("experts.up", busy, -(-visits // busy), up, model.hidden)
    net.product("experts.down", busy, -(-visits // busy), model.hidden, model.inner)
    if model.shared:
        net.gemm("shared.up", rows, up * model.shared, model.hidden)
        net.gemm("shared.down", rows, model.hidden, model.inner * model.shared)


def language_model(net: Net, model: Transformer) -> None:
    """A prompt of `net.tokens`, or one more token after them; ends in the vocabulary."""
    tokens, cached = (1, net.tokens) if net.is_decoding else (net.tokens, 0)
    blocks(net, model, tokens, cached)
    if model.vocabulary:
        net.gemm("vocabulary", net.batch * tokens, model.vocabulary, model.hidden)


LANGUAGE_MODELS = {
    "bert_base": Transformer(hidden=768, layers=12, heads=12, inner=3072, vocabulary=30522),
    "bert_large": Transformer(hidden=1024, layers=24, heads=16, inner=4096, vocabulary=30522),
    "gpt2": Transformer(hidden=768, layers=12, heads=12, inner=3072, vocabulary=50257),
    "gpt3_175b": Transformer(hidden=12288, layers=96, heads=96, inner=49152, vocabulary=50257),
    "llama2_7b": Transformer(
        hidden=4096, layers=32, heads=32, inner=11008, is_gated=True, vocabulary=32000
    ),
    "llama2_70b": Transformer(
        hidden=8192, layers=80, heads=64, kv_heads=8, inner=28672, is_gated=True, vocabulary=32000
    ),
    "llama3_8b": Transformer(
        hidden=4096, layers=32, heads=32, kv_heads=8, inner=14336, is_gated=True, vocabulary=128256
    ),
    "llama3_70b": Transformer(
        hidden=8192, layers=80, heads=64, kv_heads=8, inner=28672, is_gated=True, vocabulary=128256
    ),
    "mixtral_8x7b": Transformer(
        hidden=4096,
        layers=32,
        heads=32,
        kv_heads=8,
        inner=14336,
        is_gated=True,
        vocabulary=32000,
        experts=8,
        active=2,
    ),
}


def deepseek_v3(net: Net) -> None:
    """DeepSeek-V3: latent attention, three dense layers, then 256 experts of which 8 are used."""
    hidden, heads, q_rank, kv_rank = 7168, 128, 1536, 512
    plain, rotary, value = 128, 64, 128
    tokens, cached = (1, net.tokens) if net.is_decoding else (net.tokens, 0)
    rows = net.batch * tokens
    dense = Transformer(hidden=hidden, layers=3, heads=heads, inner=18432, is_gated=True)
    sparse = Transformer(
        hidden=hidden, layers=58, heads=heads, inner=2048, is_gated=True,
        experts=256, active=8, shared=1,
    )  # fmt: skip
    for name, model in (("dense", dense), ("sparse", sparse)):
        with net.at(name, times=model.layers):
            net.gemm("q_down", rows, q_rank, hidden)
            net.gemm("q_up", rows, heads * (plain + rotary), q_rank)
            net.gemm("kv_down", rows, kv_rank + rotary, hidden)
            net.gemm("kv_up", rows, heads * (plain + value), kv_rank)
            attention(net, heads, tokens, cached + tokens, plain + rotary, value)
            net.gemm("out", rows, hidden, heads * value)
            mlp(net, model, rows)
    net.gemm("vocabulary", rows, 129280, hidden)


def vit_b16(net: Net) -> None:
    """ViT-Base on patches of 16 x 16."""
    patches = net.conv("patches", net.image(3), 768, 16, stride=16, pad=0)
    blocks(net, Transformer(hidden=768, layers=12, heads=12, inner=3072), patches.pixels + 1)
    net.linear("fc", Feature(768, (1,)), 1000)


def dlrm(net: Net) -> None:
    """MLPerf's recommender: 13 numbers and 26 embeddings of 128, their products, two MLPs."""
    x = Feature(13, (1,), is_input=True)
    for at, channels in enumerate((512, 256, 128)):
        x = net.linear(f"bottom{at}", x, channels)
    vectors = 26 + 1
    net.product("interaction", net.batch, vectors, vectors, 128)
    x = flat(Feature(vectors * (vectors - 1) // 2 + 128, (1,)))
    for at, channels in enumerate((1024, 1024, 512, 256, 1)):
        x = net.linear(f"top{at}", x, channels)
