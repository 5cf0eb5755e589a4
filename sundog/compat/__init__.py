"""Run programs written for torch symmetric memory and CUDA as ranks of a simulated world.

    sundog.run(main, 4, torch=True)          # main() as under torchrun, on a CPU
    sundog check script.py:main --torch --world 4

Inside such a rank `torch.distributed`, its `_symmetric_memory` and `torch.cuda` answer as they do
on a GPU, for this rank: device `cuda` is the rank's CPU memory, backend `nccl` is the simulated
group. When the last rank has ended, everything is as it was before.
"""
