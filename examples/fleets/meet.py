"""All workers of all machines join one process group: the minimum that a fleet must support."""

import os
import socket

import torch
import torch.distributed as dist

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
total = torch.tensor([float(rank)], device=device)
dist.all_reduce(total)
print(f"worker {rank} of {ranks} on {socket.gethostname()}: sum of all ranks {total.item():.0f}")
dist.destroy_process_group()
