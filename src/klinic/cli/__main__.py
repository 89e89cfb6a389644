"""`python -m klinic.cli`: the command without its installed script."""

from klinic.cli import main

if __name__ == "__main__":
    main()
