"""What a compiled GPU object says about itself: ELF header, sections, the kernel's metadata."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tilewise.errors import BuildError

EM_CUDA = 190
EM_AMDGPU = 224
NT_AMDGPU_METADATA = 32
REGISTER_COUNT = 0x2F
FRAME_SIZE = 0x11
"""Attributes of a cubin's `.nv.info` section."""
PARAMETER = 0x17
"""Attribute of a kernel's own `.nv.info.` section: one parameter's place and size."""
SYSTEM_SMEM_BYTES = 1024
NO_SPACE = 8
"""The kind of section that takes none in the file, such as a block's static shared memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Elf:
    """An object file's header and what its sections hold."""

    machine: int
    abi: int
    """Which edition of the machine's own conventions the file follows."""
    flags: int
    sections: dict[str, bytes]
    sizes: dict[str, int]
    """In memory, of all sections, those without bytes in the file included."""

    @property
    def capability(self) -> int:
        """Of a cubin, the compute capability it is for: 90 for sm_90."""
        return (self.flags >> 8 if self.abi >= 8 else self.flags) & 0xFF


def read_elf(data: bytes) -> Elf:
    """The object; a BuildError where the bytes are no 64-bit ELF file."""
    try:
        return _read_elf(data)
    except (struct.error, ValueError, IndexError) as error:
        raise BuildError(f"not a 64-bit ELF object ({len(data)} bytes): {error}") from None


def _read_elf(data: bytes) -> Elf:
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("it does not start like one")
    machine, table, flags = struct.unpack_from("<H20xQI", data, 18)[:3]
    size, count, names_at = struct.unpack_from("<HHH", data, 58)
    headers = [struct.unpack_from("<IIQQQQ", data, table + at * size) for at in range(count)]
    names = headers[names_at][4]
    sections, sizes = {}, {}
    for name, kind, _, _, offset, length in headers:
        label = data[names + name : data.index(b"\0", names + name)].decode()
        sections[label] = b"" if kind == NO_SPACE else data[offset : offset + length]
        sizes[label] = length
    return Elf(machine=machine, abi=data[8], flags=flags, sections=sections, sizes=sizes)


def cubin_facts(cubin: bytes) -> dict[int, int]:
    """Attribute -> value of the kernel, such as `REGISTER_COUNT`."""
    entries = _attributes(read_elf(cubin).sections.get(".nv.info", b""))
    pairs = ((kind, body) for kind, body in entries if len(body) == 8)  # (symbol, value)
    return {kind: struct.unpack("<II", body)[1] for kind, body in pairs}


def cubin_parameters(cubin: bytes, function: str) -> tuple[int, ...]:
    """Bytes of each parameter of a kernel, in order."""
    section = read_elf(cubin).sections.get(f".nv.info.{function}")
    if section is None:
        raise BuildError(f"the object has no kernel called {function}")
    found = {}
    for kind, body in _attributes(section):
        if kind == PARAMETER:
            _, nth, _, packed = struct.unpack("<IHHI", body)
            found[nth] = packed >> 18
    return tuple(found[nth] for nth in sorted(found))


def hsaco_parameters(hsaco: bytes) -> tuple[int, ...]:
    """Bytes of each parameter that a launch passes; the runtime adds hidden ones by itself."""
    entries = hsaco_facts(hsaco).get(".args", ())
    passed = [entry for entry in entries if not entry[".value_kind"].startswith("hidden")]
    return tuple(entry[".size"] for entry in passed)


def static_smem_bytes(cubin: bytes, function: str) -> int:
    """Shared memory of a block that its kernel declares with a size.

    From Hopper on the section begins with what the system keeps, which no limit counts.
    """
    elf = read_elf(cubin)
    kept = SYSTEM_SMEM_BYTES if elf.capability >= 90 else 0
    return max(0, elf.sizes.get(f".nv.shared.{function}", 0) - kept)


def _attributes(section: bytes) -> Iterator[tuple[int, bytes]]:
    """Those with a payload."""
    at = 0
    while at + 4 <= len(section):
        form, attribute, size = struct.unpack_from("<BBH", section, at)
        at += 4
        if form == 4:  # in the other forms the size is the value itself
            yield attribute, section[at : at + size]
            at += size


def hsaco_facts(hsaco: bytes) -> dict[str, Any]:
    """The kernel's entry in an AMD object's metadata, with the object's `target` beside it.

    LLVM has spelled the rest of the target's triple in several ways; the processor comes last.
    """
    for owner, kind, body in _notes(read_elf(hsaco).sections.get(".note", b"")):
        if owner == b"AMDGPU" and kind == NT_AMDGPU_METADATA:
            metadata, _ = unpack(body, 0)
            (kernel,) = metadata["amdhsa.kernels"]
            return {**kernel, "target": metadata["amdhsa.target"].rpartition("-")[2]}
    raise BuildError("the object has no AMDGPU metadata note")


def _notes(section: bytes) -> Iterator[tuple[bytes, int, bytes]]:
    """(owner, type, contents) of each note; both texts are padded to four bytes."""
    at = 0
    while at + 12 <= len(section):
        name, size, kind = struct.unpack_from("<III", section, at)
        body = at + 12 + (name + 3 & ~3)
        yield section[at + 12 : at + 12 + name].rstrip(b"\0"), kind, section[body : body + size]
        at = body + (size + 3 & ~3)


_NUMBERS = {
    **{0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xCA: ">f", 0xCB: ">d"},
    **{0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"},
}
_COUNTED = {
    **{0xC4: ("bytes", ">B"), 0xC5: ("bytes", ">H"), 0xC6: ("bytes", ">I")},
    **{0xD9: ("text", ">B"), 0xDA: ("text", ">H"), 0xDB: ("text", ">I")},
    **{0xDC: ("list", ">H"), 0xDD: ("list", ">I"), 0xDE: ("map", ">H"), 0xDF: ("map", ">I")},
}
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}


def unpack(data: bytes, at: int) -> tuple[Any, int]:
    """One MessagePack value and where the next one starts; extension types are refused."""
    code = data[at]
    at += 1
    if code < 0x80 or code >= 0xE0:
        return code if code < 0x80 else code - 256, at
    if code in _CONSTANTS:
        return _CONSTANTS[code], at
    if code in _NUMBERS:
        (number,) = struct.unpack_from(_NUMBERS[code], data, at)
        return number, at + struct.calcsize(_NUMBERS[code])
    if code < 0xC0:
        kind = "text" if code >= 0xA0 else "list" if code >= 0x90 else "map"
        return _counted(kind, code & (0x1F if kind == "text" else 0x0F), data, at)
    if code not in _COUNTED:
        raise BuildError(f"MessagePack code {code:#x} at byte {at - 1} is not known")
    kind, form = _COUNTED[code]
    (count,) = struct.unpack_from(form, data, at)
    return _counted(kind, count, data, at + struct.calcsize(form))


def _counted(kind: str, count: int, data: bytes, at: int) -> tuple[Any, int]:
    if kind in ("text", "bytes"):
        raw = data[at : at + count]
        return raw.decode() if kind == "text" else raw, at + count
    items = []
    for _ in range(count * (2 if kind == "map" else 1)):
        item, at = unpack(data, at)
        items.append(item)
    return dict(zip(items[::2], items[1::2], strict=True)) if kind == "map" else items, at
