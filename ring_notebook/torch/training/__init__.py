"""Parts of a training loop besides collectives: prepare, data, checkpoints, schedules."""
