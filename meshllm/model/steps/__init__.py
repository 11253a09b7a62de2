"""Steps of a shard: loaded, tried, recorded, and run for several sessions."""
