"""Let engines on a CPU pad their steps to few shapes, because compiling takes most of a small engine's time.

By default there are programs for 1, 2, 4, 8... rows and 32, 64... tokens. Modules with
`EVERY_PROGRAM = True` keep them. As a program, `python few_programs.py FD`, this is an engine's process.
"""

import sys

FEW = dict(few_rows=(64,), least_tokens=64)  # fields of engine.device.batch.Buckets
APPLY = f"from dovetail.engine.build import CPU_SIZES; CPU_SIZES.update({FEW})"

if __name__ == "__main__":
    from dovetail.serve.remote import process

    exec(APPLY)
    process.main(int(sys.argv[1]))
