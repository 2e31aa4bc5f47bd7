"""The pictures of the site, `docs/pictures/*.svg`: `python -m docs.draw` draws them all anew."""
