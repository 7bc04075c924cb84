"""`python -m tilewise` is the `tilewise` command."""

from tilewise.cli import main

if __name__ == "__main__":
    main()
