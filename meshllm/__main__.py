"""Entry point of `python -m meshllm` and of the console script."""

from meshllm.cli.app import main

if __name__ == "__main__":
    main()
