"""A sink that throws samples away. By itself in a file, so that a watch's process imports nothing else with it."""


class NullSink:
    def sample(self, sample: object) -> None: ...
