"""`python -m narthex`."""

import faulthandler

from narthex.cli import main

# A fault of a C library ends a process without a word; this way its log says where every thread was.
faulthandler.enable()
main(prog_name="narthex")
