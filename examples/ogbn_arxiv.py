"""Trains a graph transformer on ogbn-arxiv: predict the subject of a paper from its citations.

    python examples/ogbn_arxiv.py --download          # ten seeds, as on OGB's leaderboard
    python examples/ogbn_arxiv.py --demo              # a first result within three minutes
    python examples/ogbn_arxiv.py --dataset synthetic-arxiv --runs 1 --epochs 20
    # where the set comes without node features:
    python examples/ogbn_arxiv.py --config examples/configs/ogbn-arxiv-no-features.toml

The model is UniMP (https://arxiv.org/abs/2009.03509): three layers of attention over citations,
made undirected, with gated skip connections. Where the set comes without its node features, labels
and degrees are the input instead. A run that was stopped goes on with --resume and ends with the
same numbers.
"""

from __future__ import annotations

import argparse
from typing import Any

from graphattn import keep_pages
from graphattn.data import load
from training import add_options, load_or_exit, parse, train


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description="Train a graph transformer on ogbn-arxiv, full batch.",
        epilog="Ten seeds of 500 epochs by default; --demo is a short version of it.",
    )
    parser.add_argument(
        "--dataset",
        default="ogbn-arxiv",
        help="ogbn-arxiv, or its stand-in synthetic-arxiv (synthetic-arxiv-5000 has 5,000 nodes)",
    )
    parser.add_argument(
        "--demo", action="store_true", help="one short run, on whichever set is there"
    )
    add_options(parser)
    args = parse(parser, argv, lambda args: "demo" if args.demo else "ogbn-arxiv")
    if args.demo:
        args.overwrite = not args.resume
    return train(load_demo(args) if args.demo else load_or_exit(parser, args), args)


def load_demo(args: argparse.Namespace) -> Any:
    """ogbn-arxiv if it is here or can be had, else its stand-in; says which and why."""
    try:
        data = load("ogbn-arxiv", root=args.root, download=True)
    except (OSError, ImportError) as error:
        args.dataset = "synthetic-arxiv"
        print(
            "Demo on synthetic-arxiv, a generated graph of the same size, because ogbn-arxiv is "
            "not in "
            f"{args.root}/ and cannot be downloaded ({first_sentence(error)})"
        )
        return load("synthetic-arxiv")
    print(f"Demo on ogbn-arxiv, found in {args.root}/")
    return data


def first_sentence(error: Exception) -> str:
    return str(error).splitlines()[0].split(". ")[0] if str(error) else type(error).__name__


if __name__ == "__main__":
    keep_pages()  # of tensors that are freed: on a CPU, twice as fast
    main()
