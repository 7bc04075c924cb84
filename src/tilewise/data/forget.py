"""Takes rows out of a store that tell of the machine in place of a kernel."""

from __future__ import annotations

from pathlib import Path

from tilewise.data.schema import faults
from tilewise.data.store import Store, read_shard, write_shard
from tilewise.errors import StoreError


def forget_faults(path: Path | str) -> int:
    """Writes the shards that hold such rows again without them; returns how many there were."""
    store, forgotten = Store(path), 0
    store.recover()
    if store.journals():
        raise StoreError(f"a sweep writes to {path}; let it end, or stop it, then forget")
    with store.rewriting():
        for shard in store.shards():
            table = read_shard(shard)
            is_fault = faults(table)
            if is_fault.any():
                write_shard(shard, table.filter(~is_fault))
                forgotten += int(is_fault.sum())
    return forgotten
