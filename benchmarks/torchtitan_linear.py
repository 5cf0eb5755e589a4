"""torchtitan's own tests of its fused linear layers, on a CPU, from a checkout.

    python benchmarks/torchtitan_linear.py CHECKOUT

The 4 tests of TestDistLinearPrimitives run unmodified but for the skip ("symmetric memory requires
CUDA"): `sundog.torch.enable()` gives torch's symm_mem ops CPU kernels. A test starts processes that
read this file again, so they are enabled too. torchtitan imports spmd_types and tyro, torch's test
classes expecttest: `pip install spmd-types tyro expecttest`.
"""

from __future__ import annotations

import os
import sys
import unittest

import sundog.torch

CHECKOUT = "SUNDOG_TORCHTITAN"
if __name__ == "__main__" and len(sys.argv) == 2:
    os.environ[CHECKOUT] = os.path.abspath(sys.argv[1])
if CHECKOUT not in os.environ:
    sys.exit("usage: python benchmarks/torchtitan_linear.py CHECKOUT")
sys.path[:0] = [os.environ[CHECKOUT], os.path.join(os.environ[CHECKOUT], "tests/unit_tests")]
sundog.torch.enable()


def main() -> int:
    skip = unittest.skipUnless
    unittest.skipUnless = lambda condition, reason: lambda case: case
    import test_distributed_linear

    unittest.skipUnless = skip
    case = test_distributed_linear.TestDistLinearPrimitives
    tests = unittest.defaultTestLoader.loadTestsFromTestCase(case)
    result = unittest.TextTestRunner(verbosity=2).run(tests)
    print(f"{result.testsRun} tests, {len(result.failures) + len(result.errors)} failed")
    return 0 if result.testsRun == 4 and result.wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main())
