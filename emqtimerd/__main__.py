"""`python -m emqtimerd` is the command `emqtimerd`."""

from emqtimerd.cli import main

main()
