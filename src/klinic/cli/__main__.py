"""`python -m klinic.cli`: the command, where no script of it is at hand."""

from klinic.cli import main

if __name__ == "__main__":
    main()
