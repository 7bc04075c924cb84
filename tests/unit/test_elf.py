"""Objects that compilers leave: ELF sections, NVIDIA's attributes, AMD's metadata."""

from __future__ import annotations

import struct

import pytest

from tilewise.engines.gpu.elf import cubin_facts, hsaco_facts, read_elf, unpack
from tilewise.errors import BuildError


def elf(machine: int, flags: int, sections: dict[str, bytes], abi: int = 0) -> bytes:
    """A 64-bit ELF file with these sections."""
    names = [b"", *(name.encode() for name in sections), b".shstrtab"]
    text = b"\0".join(names) + b"\0"
    bodies = [b"", *sections.values(), text]
    at, headers, data = 64, b"", b""
    for name, body in zip(names, bodies, strict=True):
        where = text.index(name + b"\0") if name else 0
        headers += struct.pack("<IIQQQQIIQQ", where, 1, 0, 0, at + len(data), len(body), 0, 0, 1, 0)
        data += body
    start = b"\x7fELF\x02\x01\x01\x00" + bytes([abi]) + bytes(7)
    fields = (1, machine, 1, 0, 0, at + len(data), flags, 64, 0, 0, 64, len(names), len(names) - 1)
    return start + struct.pack("<HHIQQQIHHHHHH", *fields) + data + headers


def note(owner: bytes, kind: int, body: bytes) -> bytes:
    padded = owner + b"\0" * (4 - len(owner) % 4)
    tail = b"\0" * (-len(body) % 4)
    return struct.pack("<III", len(owner) + 1, len(body), kind) + padded + body + tail


def test_sections_by_name() -> None:
    found = read_elf(elf(224, 0x54C, {".text": b"code", ".note": b"said"}))
    assert (found.machine, found.flags) == (224, 0x54C)
    assert (found.sections[".text"], found.sections[".note"]) == (b"code", b"said")


@pytest.mark.parametrize("data", [b"", b"\x7fELF", b"PE" * 64, elf(1, 1, {".text": b""})[:70]])
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(BuildError, match="not a 64-bit ELF"):
        read_elf(data)


@pytest.mark.parametrize(("abi", "flags"), [(7, 0x5A0D5A), (8, 0xA005A04)])
def test_cubins_say_their_capability_in_either_place(abi: int, flags: int) -> None:
    assert read_elf(elf(190, flags, {}, abi)).capability == 90


def test_attributes_of_a_cubin() -> None:
    # A flag without a payload, one with four bytes, then (symbol, value) pairs.
    section = struct.pack("<BBH", 3, 0x1B, 255) + struct.pack("<BBHI", 4, 0x05, 4, 7)
    section += struct.pack("<BBHII", 4, 0x2F, 8, 3, 168) + struct.pack("<BBHII", 4, 0x11, 8, 3, 24)
    assert cubin_facts(elf(190, 90, {".nv.info": section})) == {0x2F: 168, 0x11: 24}


def test_metadata_of_an_amd_object() -> None:
    kernel = b"\x82\xa5.name\xa1k\xab.vgpr_count\xcd\x01\x00"
    target = b"amdgpu9.42-amd-amdhsa-unknown-gfx942"
    body = b"\x82\xaeamdhsa.kernels\x91" + kernel + b"\xadamdhsa.target\xd9\x24" + target
    notes = note(b"GNU", 32, b"other") + note(b"AMDGPU", 32, body)
    facts = hsaco_facts(elf(224, 0x4C, {".note": notes}))
    assert facts == {".name": "k", ".vgpr_count": 256, "target": "gfx942"}
    with pytest.raises(BuildError, match="no AMDGPU metadata"):
        hsaco_facts(elf(224, 0x4C, {".note": note(b"GNU", 32, body)}))


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"\x07", 7),
        (b"\xff", -1),
        (b"\xc0", None),
        (b"\xc3", True),
        (b"\xcc\xff", 255),
        (b"\xce\x00\x01\x00\x00", 65536),
        (b"\xd1\xff\x00", -256),
        (b"\xcb" + struct.pack(">d", 1.5), 1.5),
        (b"\xa2ok", "ok"),
        (b"\xd9\x02ok", "ok"),
        (b"\xc4\x02\x00\x01", b"\x00\x01"),
        (b"\x92\x01\xa1x", [1, "x"]),
        (b"\xdc\x00\x02\x01\x02", [1, 2]),
        (b"\x81\xa1k\x91\x03", {"k": [3]}),
        (b"\xde\x00\x01\x01\x02", {1: 2}),
    ],
)
def test_messagepack(data: bytes, value: object) -> None:
    assert unpack(data + b"\xc0", 0) == (value, len(data))


def test_unknown_messagepack_is_refused() -> None:
    with pytest.raises(BuildError, match="0xc7"):
        unpack(b"\xc7\x01\x00\x00", 0)
