"""Trains a graph transformer on ogbn-products: predict the category of a product from what is
bought together with it.

    python examples/ogbn_products.py --download --device cuda     # ten seeds
    python examples/ogbn_products.py --parts 1                    # full batch instead

A step is taken on one of 25 random parts of the 2.4 million nodes and the edges within it, so that
a GPU holds no more than a part; the whole graph is evaluated on the CPU, in every tenth epoch.
"""

from __future__ import annotations

import argparse
from typing import Any

from graphattn import keep_pages
from training import run


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description="Train a graph transformer on ogbn-products, on random parts of its nodes."
    )
    parser.set_defaults(dataset="ogbn-products")
    return run(parser, argv)


if __name__ == "__main__":
    keep_pages()  # of tensors that are freed: on a CPU, twice as fast
    main()
