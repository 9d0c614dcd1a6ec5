"""The content-addressed folder on one machine that holds blobs, what is known of layers, and unpacked trees."""
