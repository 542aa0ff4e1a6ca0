"""A rank without a model: counts to 20 in a file, as a run does with checkpoints, and beats. Needs no torch.

python -m tests.sweeps.counting_rank FOLDER [BEHAVIOUR]
"""

import os
import sys
import time
from pathlib import Path

from sweeps.rank import die_with_parent


def main() -> int:
    die_with_parent()
    folder, behaviour = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
    rank = int(os.environ["RANK"])
    (folder / f"pid_{rank}").write_text(str(os.getpid()))
    (folder / f"devices_{rank}").write_text(f"{os.environ.get('CUDA_VISIBLE_DEVICES')} {os.environ['LOCAL_RANK']}")
    if behaviour == "refuses":
        print("error: no such corpus", file=sys.stderr)
        return 2
    if behaviour == "breaks" and rank == 1:
        raise RuntimeError("out of luck")
    count = folder / f"count_{rank}"
    beats = folder / "heartbeat"
    beats.mkdir(exist_ok=True)
    for number in range(int(count.read_text()) if count.exists() else 0, 20):
        time.sleep(0.05)
        (folder / "seen").open("a").write(f"{rank} {number}\n")
        count.write_text(str(number + 1))
        while any(int((folder / f"count_{r}").read_text() or 0) < number for r in range(2) if r != rank):
            time.sleep(0.01)  # a collective: nobody runs ahead by more than one
        (beats / f"rank_{rank}").touch()
    return 0


if __name__ == "__main__":
    sys.exit(main())
