-- The official image of PostgreSQL runs this once, when its volume is new.
CREATE DATABASE prefect;
