"""`python -m narthex`."""

from narthex.cli import main

main()
