"""Run a command in an image on this host: the job, and the engines that can start it."""
