"use client";

/** One of a few: radio buttons that look like one control. */
export function Choice<T extends string>({ name, label, options, value, onChange }: {
  name: string;
  label: string;
  options: readonly (readonly [T, string])[];
  value: T;
  onChange: (value: T) => void;
}) {
  return (
    <fieldset className="min-w-0">
      <legend className="eyebrow mb-1.5">{label}</legend>
      <div className="choice">
        {options.map(([option, words]) => (
          <label key={option}>
            <input type="radio" name={name} value={option} checked={value === option} onChange={() => onChange(option)} />
            {words}
          </label>
        ))}
      </div>
    </fieldset>
  );
}
