"""Real clients, unchanged, against a node: `python -m tests.clients`.

Each client is a script that is run in a virtual environment of its own, with the variables
``OPENAI_BASE_URL`` and ``OPENAI_API_KEY``. It prints one JSON object for each call.
"""
