"""What `fimaq compare` adds to the time of its runs: reading the suite, looking for finished cells, tables.

    python benchmarks/compare_share.py paper-loss --quick --data DIR --weights-dir DIR --out DIR [--results FILE]

takes the arguments of `fimaq compare`. Counted as a run's own is everything that `fimaq quantize` would do after
its imports: building the model, reading images, quantizing, storing, evaluating.
"""

import argparse
import json
import platform
import sys
import time
from typing import Any

BEGAN = time.monotonic()


def main() -> None:
    from fimaq.cli import compare
    from fimaq.cli import main as fimaq

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", help="file that the row is appended to, as JSON")
    options, arguments = parser.parse_known_args()
    run, seconds = compare._run, []

    def timed(*given: Any) -> dict[str, Any]:
        began = time.monotonic()
        try:
            return run(*given)
        finally:
            seconds.append(time.monotonic() - began)

    compare._run = timed
    sys.argv = ["fimaq", "compare", *arguments]
    imported = time.monotonic()
    try:
        fimaq()
    finally:
        own = time.monotonic() - imported - sum(seconds)
        row = {
            "suite": arguments[0],
            "quick": "--quick" in arguments,
            "cells": len(seconds),
            "seconds_in_runs": round(sum(seconds), 2),
            "seconds_of_compare": round(own, 3),
            "share": round(own / sum(seconds), 5) if seconds else None,
            "seconds_of_imports": round(imported - BEGAN, 2),
            "machine": platform.processor() or platform.machine(),
        }
        print(json.dumps(row), file=sys.stderr)
        if options.results:
            with open(options.results, "a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
