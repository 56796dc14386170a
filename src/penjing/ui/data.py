"""The tab data."""

from fastapi import FastAPI

from penjing.ui.site import Site


def add_routes(app: FastAPI, site: Site) -> None:
    """Routes below /api/data."""
