import time

from django.core.management.base import BaseCommand

from interlock.contrib.django import single


@single
class Command(BaseCommand):
    def handle(self, *args, **options):
        print("runs", flush=True)
        time.sleep(120)
