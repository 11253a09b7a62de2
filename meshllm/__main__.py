"""The door for `python -m meshllm` and the console script."""

from meshllm.cli.app import main

if __name__ == "__main__":
    main()
