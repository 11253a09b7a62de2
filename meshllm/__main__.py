"""The door for `python -m meshllm` and the console script; knows nothing but where the door is."""

from meshllm.cli.app import main

if __name__ == "__main__":
    main()
