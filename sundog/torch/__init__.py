"""sundog inside torch: ops with gradients, torch.compile, process groups, modules.

library     every op as an op of torch: schema, fake kernel, backward formula
names       worlds by name
calls       where `world.all_reduce(x)` goes when it is differentiated or compiled
modules     column- and row-parallel layers, and styles for parallelize_module
"""
