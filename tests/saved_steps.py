"""The checkpoint of a step, as a run's loop has it written."""


def save(checkpoints, step, models, metrics, counters):
    checkpoints.finish(step, metrics, counters)
    checkpoints.save_finished(models)
    checkpoints.complete(models, wait=True)
