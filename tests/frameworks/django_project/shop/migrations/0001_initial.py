import uuid

from django.db import migrations, models

from interlock.fence.django import create_table

ID = ("id", models.BigAutoField(primary_key=True, serialize=False, auto_created=True))


class Migration(migrations.Migration):
    initial = True
    operations = [
        migrations.CreateModel(
            name="Order",
            fields=[
                ID,
                ("state", models.CharField(default="new", max_length=20)),
                ("stock", models.IntegerField(default=0)),
            ],
        ),
        migrations.CreateModel(
            name="Letter", fields=[("address", models.CharField(max_length=200, primary_key=True, serialize=False))]
        ),
        migrations.CreateModel(
            name="Parcel",
            fields=[("id", models.UUIDField(default=uuid.uuid4, primary_key=True, serialize=False))],
        ),
        migrations.CreateModel(
            name="Paper",
            fields=[
                ID,
                ("fence", models.BigIntegerField(default=None, editable=False, null=True)),
                ("words", models.TextField(default="")),
            ],
        ),
        migrations.CreateModel(
            name="Gift",
            fields=[
                (
                    "order_ptr",
                    models.OneToOneField(
                        on_delete=models.CASCADE, parent_link=True, primary_key=True, serialize=False, to="shop.order"
                    ),
                ),
                ("card", models.TextField(default="")),
            ],
            bases=("shop.order",),
        ),
        migrations.CreateModel(
            name="Rush", fields=[], options={"proxy": True, "indexes": [], "constraints": []}, bases=("shop.order",)
        ),
        migrations.CreateModel(
            name="Note",
            fields=[
                ID,
                ("worker", models.IntegerField()),
                ("order", models.ForeignKey(on_delete=models.CASCADE, to="shop.order")),
            ],
        ),
        create_table(),
    ]
