"""Front ends: training loops of other libraries that drive a `growlab.Grower`."""
