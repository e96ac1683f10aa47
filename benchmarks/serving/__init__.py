"""What `serve.py` measures with: engines that stay alive, what is counted inside them, and Mooncake beside them."""
