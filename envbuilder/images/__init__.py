"""From layers to images: how packages are laid out in layers, and how an image is put together."""
