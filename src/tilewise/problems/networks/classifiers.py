"""Networks that name what an image shows."""

from __future__ import annotations

from collections.abc import Sequence

from tilewise.problems.networks.net import Feature, Net, flat, joined, pooled, rounded

CLASSES = 1000


def resnet_stages(
    net: Net,
    depths: Sequence[int],
    *,
    is_deep: bool = True,
    groups: int = 1,
    width: int = 64,
    frozen: int = 0,
    dilated: int = 0,
) -> list[Feature]:
    """The features of the four stages; the first `frozen` and the stem are not trained.

    `width` is the inner channels of a group in the first stage. The last `dilated` stages keep
    their image size and dilate instead of striding.
    """
    with net.at("stem", frozen=frozen > 0):
        x = net.conv("conv1", net.image(3), 64, 7, stride=2)
    x = net.pool(x, 3, 2, pad=1)
    features = []
    dilation = 1
    for stage, depth in enumerate(depths):
        for block in range(depth):
            stride = 2 if stage and not block else 1
            before = dilation
            if stride == 2 and stage >= 4 - dilated:
                stride, dilation = 1, dilation * 2
            with net.at(f"layer{stage + 1}.{block}", frozen=stage < frozen):
                # The block that would have strided still sees the old spacing.
                spacing = before if block == 0 else dilation
                planes = 64 * 2**stage
                if is_deep:
                    inner = planes * width // 64 * groups
                    x = _bottleneck(net, x, inner, planes * 4, stride, groups, spacing)
                else:
                    x = _basic(net, x, planes, stride)
        features.append(x)
    return features


def _bottleneck(
    net: Net, x: Feature, inner: int, out: int, stride: int, groups: int, dilation: int
) -> Feature:
    if stride != 1 or x.channels != out:
        net.conv("downsample", x, out, stride=stride)
    y = net.conv("conv1", x, inner)
    y = net.conv("conv2", y, inner, 3, stride=stride, groups=groups, dilation=dilation)
    return net.conv("conv3", y, out)


def _basic(net: Net, x: Feature, out: int, stride: int) -> Feature:
    if stride != 1 or x.channels != out:
        net.conv("downsample", x, out, stride=stride)
    return net.conv("conv2", net.conv("conv1", x, out, 3, stride=stride), out, 3)


def resnet18(net: Net) -> None:
    net.linear("fc", pooled(resnet_stages(net, (2, 2, 2, 2), is_deep=False)[-1]), CLASSES)


def resnet50(net: Net) -> None:
    net.linear("fc", pooled(resnet_stages(net, (3, 4, 6, 3))[-1]), CLASSES)


def resnet101(net: Net) -> None:
    net.linear("fc", pooled(resnet_stages(net, (3, 4, 23, 3))[-1]), CLASSES)


def resnext50(net: Net) -> None:
    """ResNeXt-50, 32 groups of 4 channels."""
    stages = resnet_stages(net, (3, 4, 6, 3), groups=32, width=4)
    net.linear("fc", pooled(stages[-1]), CLASSES)


def vgg_stages(net: Net) -> list[Feature]:
    """What each of VGG-16's five stages gives before it is pooled."""
    x, features = net.image(3), []
    for stage, (depth, channels) in enumerate(
        ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)), start=1
    ):
        for layer in range(depth):
            x = net.conv(f"conv{stage}_{layer + 1}", x, channels, 3)
        features.append(x)
        x = net.pool(x, 2, ceil=True)
    return features


def vgg16(net: Net) -> None:
    last = vgg_stages(net)[-1]
    x = flat(Feature(last.channels, (7, 7)))  # averaged down to 7 x 7 whatever the image
    for name, channels in (("fc6", 4096), ("fc7", 4096), ("fc8", CLASSES)):
        x = net.linear(name, x, channels)


def inception_v3(net: Net) -> None:
    x = net.conv("conv1a", net.image(3), 32, 3, stride=2, pad=0)
    x = net.conv("conv2b", net.conv("conv2a", x, 32, 3, pad=0), 64, 3)
    x = net.conv("conv3b", net.pool(x, 3, 2), 80)
    x = net.pool(net.conv("conv4a", x, 192, 3, pad=0), 3, 2)
    for name, pool_channels in (("5b", 32), ("5c", 64), ("5d", 64)):
        with net.at(name):
            x = _inception_a(net, x, pool_channels)
    with net.at("6a"):
        side = _chain(net, "double", x, (64, 1), (96, 3))
        side = net.conv("double.3", side, 96, 3, stride=2, pad=0)
        x = joined(net.conv("3x3", x, 384, 3, stride=2, pad=0), side, net.pool(x, 3, 2))
    for name, inner in (("6b", 128), ("6c", 160), ("6d", 160), ("6e", 192)):
        with net.at(name):
            x = _inception_c(net, x, inner)
    with net.at("7a"):
        a = net.conv("3x3.2", net.conv("3x3.1", x, 192), 320, 3, stride=2, pad=0)
        b = _chain(net, "7x7x3", x, (192, 1), (192, (1, 7)), (192, (7, 1)))
        x = joined(a, net.conv("7x7x3.4", b, 192, 3, stride=2, pad=0), net.pool(x, 3, 2))
    for name in ("7b", "7c"):
        with net.at(name):
            x = _inception_e(net, x)
    net.linear("fc", pooled(x), CLASSES)


def _chain(net: Net, name: str, x: Feature, *steps: tuple[int, int | tuple[int, int]]) -> Feature:
    for number, (channels, taps) in enumerate(steps, 1):
        x = net.conv(f"{name}.{number}", x, channels, taps)
    return x


def _inception_a(net: Net, x: Feature, pool_channels: int) -> Feature:
    return joined(
        net.conv("1x1", x, 64),
        _chain(net, "5x5", x, (48, 1), (64, 5)),
        _chain(net, "double", x, (64, 1), (96, 3), (96, 3)),
        net.conv("pool", x, pool_channels),
    )


def _inception_c(net: Net, x: Feature, inner: int) -> Feature:
    row, column = (1, 7), (7, 1)
    return joined(
        net.conv("1x1", x, 192),
        _chain(net, "7x7", x, (inner, 1), (inner, row), (192, column)),
        _chain(
            net, "double", x, (inner, 1), (inner, column), (inner, row), (inner, column), (192, row)
        ),
        net.conv("pool", x, 192),
    )


def _inception_e(net: Net, x: Feature) -> Feature:
    a = net.conv("3x3.1", x, 384)
    b = _chain(net, "double", x, (448, 1), (384, 3))
    split = [
        net.conv(f"{name}.{side}", y, 384, taps)
        for name, y in (("3x3", a), ("double", b))
        for side, taps in (("row", (1, 3)), ("column", (3, 1)))
    ]
    return joined(net.conv("1x1", x, 320), *split, net.conv("pool", x, 192))


def _inverted(
    net: Net, x: Feature, out: int, taps: int, stride: int, expanded: int, squeezed: int = 0
) -> Feature:
    """Expand, filter every channel by itself, weigh the channels if `squeezed`, project."""
    y = net.conv("expand", x, expanded) if expanded != x.channels else x
    y = net.depthwise("depthwise", y, taps, stride=stride)
    if squeezed:
        net.conv("excite", net.conv("squeeze", pooled(y), squeezed), expanded)
    return net.conv("project", y, out)


def mobilenet_v2(net: Net) -> None:
    x = net.conv("stem", net.image(3), 32, 3, stride=2)
    rows = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1),
            (6, 160, 3, 2), (6, 320, 1, 1))  # fmt: skip
    for stage, (factor, out, depth, stride) in enumerate(rows):
        for block in range(depth):
            with net.at(f"{stage}.{block}"):
                x = _inverted(net, x, out, 3, stride if not block else 1, x.channels * factor)
    net.linear("fc", pooled(net.conv("head", x, 1280)), CLASSES)


def mobilenet_v3(net: Net) -> None:
    """MobileNet-v3, large."""
    x = net.conv("stem", net.image(3), 16, 3, stride=2)
    rows = ((3, 16, 16, 0, 1), (3, 64, 24, 0, 2), (3, 72, 24, 0, 1), (5, 72, 40, 1, 2),
            (5, 120, 40, 1, 1), (5, 120, 40, 1, 1), (3, 240, 80, 0, 2), (3, 200, 80, 0, 1),
            (3, 184, 80, 0, 1), (3, 184, 80, 0, 1), (3, 480, 112, 1, 1), (3, 672, 112, 1, 1),
            (5, 672, 160, 1, 2), (5, 960, 160, 1, 1), (5, 960, 160, 1, 1))  # fmt: skip
    for block, (taps, expanded, out, squeezes, stride) in enumerate(rows):
        with net.at(f"{block}"):
            squeezed = rounded(expanded // 4) if squeezes else 0
            x = _inverted(net, x, out, taps, stride, expanded, squeezed)
    x = pooled(net.conv("head", x, 960))
    net.linear("fc2", net.linear("fc1", x, 1280), CLASSES)


def efficientnet_b0(net: Net) -> None:
    x = net.conv("stem", net.image(3), 32, 3, stride=2)
    rows = ((1, 3, 1, 16, 1), (6, 3, 2, 24, 2), (6, 5, 2, 40, 2), (6, 3, 2, 80, 3),
            (6, 5, 1, 112, 3), (6, 5, 2, 192, 4), (6, 3, 1, 320, 1))  # fmt: skip
    for stage, (factor, taps, stride, out, depth) in enumerate(rows):
        for block in range(depth):
            with net.at(f"{stage}.{block}"):
                step, inner = stride if not block else 1, x.channels * factor
                x = _inverted(net, x, out, taps, step, inner, max(1, x.channels // 4))
    net.linear("fc", pooled(net.conv("head", x, 1280)), CLASSES)


def convnext_tiny(net: Net) -> None:
    x = net.conv("stem", net.image(3), 96, 4, stride=4, pad=0)
    for stage, (channels, depth) in enumerate(((96, 3), (192, 3), (384, 9), (768, 3))):
        if stage:
            x = net.conv(f"downsample{stage}", x, channels, 2, stride=2, pad=0)
        with net.at(f"stage{stage}", times=depth):
            y = net.linear("expand", net.depthwise("depthwise", x, 7), 4 * channels)
            net.linear("project", y, channels)
    net.linear("fc", pooled(x), CLASSES)
