"""From locked files to layers: fetch, build from source, install layout, bytecode."""
