from django.core.management.base import BaseCommand

from interlock.contrib.django import single


@single(name="load:{region}")
class Command(BaseCommand):
    def add_arguments(self, parser):
        parser.add_argument("--region", default="eu")
        parser.add_argument("--fail", action="store_true")

    def handle(self, *args, region, fail, **options):
        if fail:
            raise LookupError("an error of the command")
        return region
