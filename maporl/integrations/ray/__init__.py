"""Where a run samples and learns: in the processes of the launcher, or in groups of processes that Ray starts.

A *group* is a set of policies with the processes that train them, and the processes that sample from copies of their
weights. The *driver* is the process with the trainer. It plays the dialogues, scores them and computes advantages, and
it holds no weights. :class:`maporl.training.home.TeamHome` is what the trainer asks. Only the modules ``ray_*``
import Ray.
"""
