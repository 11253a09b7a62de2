"""Real engines as providers: ``python -m tests.engines``, or with the names of some engines.

Each engine is installed into a virtual environment of its own, serves the weights of the built-in
model, and joins a mesh by `meshllm provide`. All calls go to another node of the mesh.
"""
