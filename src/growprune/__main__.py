"""`python -m growprune` is the `growprune` command."""

from growprune.cli import main

main()
