"""torch's stores and groups: imported from where torch promises them, typed by where it keeps them."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore
else:
    from torch.distributed import PrefixStore, Store, TCPStore
    from torch.distributed.distributed_c10d import ProcessGroupGloo

__all__ = ["PrefixStore", "ProcessGroupGloo", "Store", "TCPStore"]
