"""Horovod's way for Keras: schedules of the learning rate, and a start from the last checkpoint."""

import argparse
import math
import os

import horovod.keras as hvd
import keras
from keras.datasets import mnist
from keras.layers import Conv2D, Dense, Flatten, Input, MaxPooling2D
from keras.models import Sequential

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint-format", default="./checkpoint-{epoch}.keras")
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--fp16-allreduce", action="store_true")
args = parser.parse_args()

hvd.init()
verbose = 2 if hvd.rank() == 0 else 0
last = 0
for epoch in range(args.epochs, 0, -1):
    if os.path.exists(args.checkpoint_format.format(epoch=epoch)):
        last = epoch
        break
last = int(hvd.broadcast(last, 0, name="resume_from_epoch"))  # only rank 0 has the files for certain

(x_train, y_train), (x_test, y_test) = mnist.load_data()
x_train = x_train.reshape(-1, 28, 28, 1).astype("float32") / 255
x_test = x_test.reshape(-1, 28, 28, 1).astype("float32") / 255
y_train = keras.utils.to_categorical(y_train, 10)
y_test = keras.utils.to_categorical(y_test, 10)

compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
rate = 0.05 * hvd.size()
if last > 0 and hvd.rank() == 0:
    model = hvd.load_model(args.checkpoint_format.format(epoch=last), compression=compression)
else:
    model = Sequential()
    model.add(Input((28, 28, 1)))
    model.add(Conv2D(8, kernel_size=(3, 3), activation="relu"))
    model.add(MaxPooling2D(pool_size=(2, 2)))
    model.add(Flatten())
    model.add(Dense(32, activation="relu"))
    model.add(Dense(10, activation="softmax"))
    opt = hvd.DistributedOptimizer(keras.optimizers.SGD(rate, momentum=0.9), compression=compression)
    model.compile(loss=keras.losses.categorical_crossentropy, optimizer=opt, metrics=["accuracy"])

callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(warmup_epochs=2, initial_lr=rate, verbose=verbose),
    hvd.callbacks.LearningRateScheduleCallback(start_epoch=2, end_epoch=4, multiplier=1.0, initial_lr=rate),
    hvd.callbacks.LearningRateScheduleCallback(start_epoch=4, multiplier=1e-1, initial_lr=rate),
]
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint(args.checkpoint_format))
model.fit(
    x_train,
    y_train,
    batch_size=50,
    steps_per_epoch=math.ceil(30 / hvd.size()),
    callbacks=callbacks,
    epochs=args.epochs,
    initial_epoch=last,
    verbose=verbose,
    validation_data=(x_test, y_test),
)
score = hvd.allreduce(model.evaluate(x_test, y_test, verbose=0))
weights = sum(float(abs(one).sum()) for one in model.get_weights())
print("from %d accuracy %.2f weights %.6f" % (last, score[1], weights))
