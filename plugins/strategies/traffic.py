"""Counts what this rank hands to collectives, op by op."""
from __future__ import annotations
from collections import Counter
from typing import Any
import torch
from torch.utils._python_dispatch import TorchDispatchMode

class Traffic(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = Counter()
        self.raw = []
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        if "c10d" in name:
            def flat(x):
                if isinstance(x, torch.Tensor): return [x.numel()*x.element_size()]
                if isinstance(x,(list,tuple)): return [b for y in x for b in flat(y)]
                return []
            self.ops[(name, tuple(tuple(flat(a)) if sum(flat(a)) else (type(a).__name__ if not isinstance(a,(int,str)) else a) for a in args))]+=1
        return func(*args, **(kwargs or {}))
