"""Pictures of the paged cache, from immutable snapshots. Nothing here touches a running engine."""

from pagedkv.inspect.draw import draw_cache
from pagedkv.inspect.example import ExampleStage, copy_on_write_example, example_names

__all__ = ["ExampleStage", "copy_on_write_example", "draw_cache", "example_names"]
