"""The ledger's pages and their JSON API, mounted into Airflow's api-server by ``plugin.py``.

``app.py`` makes the application, ``access.py`` says who may do what, ``lending.py`` lends connections to the ledger,
``reading.py`` and ``acting.py`` are the routes, ``shapes.py`` turns lines into JSON. ``static/`` is the page: plain ES
modules and CSS, served as they are. Only the api-server imports this.
"""
