"""Networks that answer for every pixel, find objects, or see volumes and sound."""

from __future__ import annotations

from tilewise.problems.networks.classifiers import resnet_stages, vgg_stages
from tilewise.problems.networks.net import Feature, Net, joined, pooled, upsampled
from tilewise.problems.networks.transformers import Transformer, blocks


def unet(net: Net) -> None:
    """U-Net with padded convolutions, so that any multiple of 16 goes in and comes out."""
    x, skips = net.image(3), []
    for depth, channels in enumerate((64, 128, 256, 512, 1024)):
        with net.at(f"down{depth}"):
            x = net.conv("conv2", net.conv("conv1", x, channels, 3), channels, 3)
        if depth < 4:
            skips.append(x)
            x = net.pool(x, 2)
    for depth in (3, 2, 1, 0):
        with net.at(f"up{depth}"):
            skip = skips[depth]
            x = net.conv("up", x, skip.channels, 2, stride=2, pad=0, transposed=True)
            x = net.conv("conv1", joined(skip, x), skip.channels, 3)
            x = net.conv("conv2", x, skip.channels, 3)
    net.conv("classes", x, 2)


def deeplab_v3(net: Net) -> None:
    """DeepLab-v3 on ResNet-50, output stride 8: dilated stages and pyramid."""
    x = resnet_stages(net, (3, 4, 6, 3), dilated=2)[-1]
    with net.at("aspp"):
        branches = [net.conv("1x1", x, 256)]
        branches += [net.conv(f"rate{rate}", x, 256, 3, dilation=rate) for rate in (12, 24, 36)]
        net.conv("pooled", pooled(x), 256)
        x = net.conv("project", joined(*branches, branches[0]), 256)
    net.conv("classes", net.conv("head", x, 256, 3), 21)


def retinanet(net: Net) -> None:
    """RetinaNet as MLPerf trains it: ResNeXt-50, its stem and first stage frozen, 264 classes."""
    stages = resnet_stages(net, (3, 4, 6, 3), groups=32, width=4, frozen=1)
    inner = [net.conv(f"fpn.inner.c{at}", x, 256) for at, x in enumerate(stages[1:], 3)]
    maps = [net.conv(f"fpn.layer.p{at}", x, 256, 3) for at, x in enumerate(inner, 3)]
    for name in ("fpn.p6", "fpn.p7"):
        maps.append(net.conv(name, maps[-1], 256, 3, stride=2))
    anchors, classes = 9, 264
    for x in maps:
        for head, channels in (("cls", anchors * classes), ("bbox", anchors * 4)):
            with net.at(f"head.{head}@{x.size[0]}"):
                with net.at("tower", times=4):
                    y = net.conv("conv", x, 256, 3)
                net.conv("out", y, channels, 3)


def ssd300(net: Net) -> None:
    """SSD on VGG-16, six feature maps, 91 classes."""
    stages = vgg_stages(net)
    x = net.pool(stages[-1], 3, 1, pad=1)
    x = net.conv("conv7", net.conv("conv6", x, 1024, 3, dilation=6), 1024)
    features = [stages[3], x]
    for at, (inner, out, stride, pad) in enumerate(
        ((256, 512, 2, 1), (128, 256, 2, 1), (128, 256, 1, 0), (128, 256, 1, 0)), 8
    ):
        x = net.conv(
            f"conv{at}_2", net.conv(f"conv{at}_1", x, inner), out, 3, stride=stride, pad=pad
        )
        features.append(x)
    for at, (x, boxes) in enumerate(zip(features, (4, 6, 6, 6, 4, 4), strict=True)):
        net.conv(f"class{at}", x, boxes * 91, 3)
        net.conv(f"box{at}", x, boxes * 4, 3)


def yolo_v3(net: Net) -> None:
    """YOLO-v3 on Darknet-53: three scales of 3 boxes over 80 classes."""
    x, stages = net.conv("stem", net.image(3), 32, 3), []
    for stage, depth in enumerate((1, 2, 8, 8, 4)):
        x = net.conv(f"down{stage}", x, 64 * 2**stage, 3, stride=2)
        with net.at(f"stage{stage}", times=depth):
            net.conv("conv2", net.conv("conv1", x, x.channels // 2), x.channels, 3)
        stages.append(x)
    for scale, channels in enumerate((512, 256, 128)):
        with net.at(f"head{scale}"):
            if scale:
                up = upsampled(net.conv("up", x, channels))
                x = joined(up, stages[4 - scale])
            for step in range(2):
                x = net.conv(f"conv{2 * step}", x, channels)
                x = net.conv(f"conv{2 * step + 1}", x, 2 * channels, 3)
            x = net.conv("conv4", x, channels)
            net.conv("boxes", net.conv("conv5", x, 2 * channels, 3), 3 * (4 + 1 + 80))


def r3d18(net: Net) -> None:
    """3-D ResNet-18 over clips of 16 frames."""
    clip = net.image(3, 16, net.size, net.size)
    x = net.conv("stem", clip, 64, (3, 7, 7), stride=(1, 2, 2))
    for stage, channels in enumerate((64, 128, 256, 512)):
        for block in range(2):
            stride = 2 if stage and not block else 1
            with net.at(f"layer{stage + 1}.{block}"):
                if stride == 2:
                    net.conv("downsample", x, channels, stride=stride)
                x = net.conv("conv1", x, channels, 3, stride=stride)
                x = net.conv("conv2", x, channels, 3)
    net.linear("fc", pooled(x), 400)


def unet3d(net: Net) -> None:
    """3-D U-Net for medical volumes, as MLPerf trains it on cubes of 128."""
    x, skips = net.image(1, net.size, net.size, net.size), []
    for depth, channels in enumerate((32, 64, 128, 256, 320, 320)):
        with net.at(f"down{depth}"):
            x = net.conv("conv1", x, channels, 3, stride=2 if depth else 1)
            x = net.conv("conv2", x, channels, 3)
        skips.append(x)
    for depth in (4, 3, 2, 1, 0):
        with net.at(f"up{depth}"):
            skip = skips[depth]
            x = net.conv("up", x, skip.channels, 2, stride=2, pad=0, transposed=True)
            x = net.conv("conv1", joined(x, skip), skip.channels, 3)
            x = net.conv("conv2", x, skip.channels, 3)
    net.conv("classes", x, 3)


def wav2vec2(net: Net) -> None:
    """wav2vec 2.0 base over `tokens` samples of sound: 1-D convolutions, then a transformer."""
    x = Feature(1, (net.tokens,), is_input=True)
    for at, (taps, stride) in enumerate(((10, 5), *((3, 2),) * 4, *((2, 2),) * 2)):
        x = net.conv(f"conv{at}", x, 512, taps, stride=stride, pad=0)
    x = net.linear("project", x, 768)
    net.conv("position", x, 768, 128, pad=64, groups=16)
    blocks(net, Transformer(hidden=768, layers=12, heads=12, inner=3072), x.size[0])
